"""graphdecode."""
