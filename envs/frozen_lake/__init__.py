"""FrozenLake: Gymnasium's own grid world as text, on a fixed map or on a random one per seed."""
