"""The hosted trainer's judge contract over HTTP: wire format, client, server."""
