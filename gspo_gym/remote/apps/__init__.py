"""Task apps that we train on: client, episodes, rewards, probes."""
