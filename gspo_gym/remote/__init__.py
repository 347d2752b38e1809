"""Task apps that play for us, the gateway that records them, and our environments served to others."""
