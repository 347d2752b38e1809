"""How well a judge agrees with people, and which attacks fool it."""
