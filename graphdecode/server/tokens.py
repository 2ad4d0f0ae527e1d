"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from graphdecode.errors import shown
from graphdecode.server.chat_completions import rendered_chat
from graphdecode.server.desk import Desk
from graphdecode.server.http_errors import HttpError
from graphdecode.server.protocol import Detokenize, Tokenize
from graphdecode.server.service import Service


def prepared_tokens(desk: Desk, body: Tokenize) -> bytes:
    """Return the answer with the tokens of a text or of a conversation.

    Raises:
        HttpError: there is none.
    """
    if body.prompt is not None:
        ids = desk.intake.encode(body.prompt, special=body.add_special_tokens is not False)
    elif body.messages is not None:
        ids = rendered_chat(desk, body).token_ids
    else:
        raise HttpError(400, "prompt must be a text, or messages a conversation", param="prompt")
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": desk.serves.rules.capacity.token_limit,
        "tokens": ids,
        "token_strs": desk.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
    }
    return bytes(JSONResponse(answer).body)


def prepared_text(desk: Desk, body: Detokenize) -> bytes:
    """Return the answer with the text of some tokens.

    Raises:
        HttpError: one is none of the model's.
    """
    vocab_size = desk.serves.rules.vocab_size
    wrong = [token for token in body.tokens if not 0 <= token < vocab_size]
    if wrong:
        raise HttpError(400, f"tokens must be in 0..{vocab_size - 1}, got {shown(wrong[:5])}", param="tokens")
    return bytes(JSONResponse({"prompt": desk.tokenizer.decode(body.tokens)}).body)


async def as_it_is(service: Service, prepared: bytes, caller: str) -> Response:
    """Return the response that was prepared."""
    return Response(prepared, media_type="application/json")


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return what clients that render and tokenise themselves want to know."""
    tokenizer = service.tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": service.client.rules.capacity.token_limit,
        "chat_template": tokenizer.chat_template,
        **special,
    }
