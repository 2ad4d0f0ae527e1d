"""What several processes compute together."""
