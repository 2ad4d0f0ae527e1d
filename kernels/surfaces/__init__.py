"""Operations that only the drop-in surfaces use; no engine launches any of them."""
