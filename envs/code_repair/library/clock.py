"""Times of the day in minutes since midnight."""

DAY = 24 * 60


def parse(text: str) -> int:
    """Read "9:05 am" or "12:30 pm".

    >>> parse("12:30 am"), parse("1:05 pm")
    (30, 785)
    """
    time, half = text.split(" ")
    hours, minutes = time.split(":")
    total = int(hours) % 12 * 60 + int(minutes)
    if half == "pm":
        total += 12 * 60
    return total


def show(minutes: int) -> str:
    """Write a time on a clock of 24 hours.

    >>> show(545)
    '09:05'
    """
    minutes = minutes % DAY
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def between(start: str, end: str) -> int:
    """Minutes from start to the next end; 0 if they are the same.

    >>> between("11:00 pm", "1:30 am")
    150
    """
    return (parse(end) - parse(start)) % DAY
