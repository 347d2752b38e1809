"""The judge over HTTP: contract, client, server."""
