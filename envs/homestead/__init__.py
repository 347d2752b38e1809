"""Homestead: settle a seeded wilderness, told as text; twenty small achievements in one episode."""
