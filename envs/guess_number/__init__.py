"""GuessNumber: find a hidden integer from higher/lower hints within a few guesses."""
