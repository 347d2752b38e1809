"""Prime numbers."""


def primes_below(limit: int) -> list[int]:
    """All primes smaller than the limit.

    >>> primes_below(12)
    [2, 3, 5, 7, 11]
    """
    is_prime = [True] * max(limit, 0)
    primes = []
    for number in range(2, limit):
        if is_prime[number]:
            primes.append(number)
            for multiple in range(number * number, limit, number):
                is_prime[multiple] = False
    return primes


def factors(number: int) -> list[int]:
    """The prime factors in order, each as often as it divides.

    >>> factors(60)
    [2, 2, 3, 5]
    """
    found = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        found.append(number)
    return found


def divisors(number: int) -> list[int]:
    """All that divide the number, itself included, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
