"""Task apps that play episodes for us, the gateway that records them, and our environments served to others."""
