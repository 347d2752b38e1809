"""Task apps to train on: client, episodes, rewards, probes."""
