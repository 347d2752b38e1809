"""Messages and tokens: rendering, parsing, and checking that the two agree."""
