"""Messages and tokens: rendering, parsing, and checks that the two agree."""
