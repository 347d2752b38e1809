"""Countdown: make a number out of given ones with + - * /, in one expression or step by step."""
