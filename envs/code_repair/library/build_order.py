"""An order of work in which everything comes after what it needs."""


def build_order(needs: dict[str, list[str]]) -> list[str]:
    """The names so that each follows all that it needs, the alphabetically first that is ready at any time.

    ValueError if they need each other in a circle. What is only needed counts as a name too.

    >>> build_order({"app": ["lib", "core"], "lib": ["core"]})
    ['core', 'lib', 'app']
    """
    names = sorted(set(needs).union(*needs.values()))
    order: list[str] = []
    while len(order) < len(names):
        ready = [name for name in names if name not in order and all(need in order for need in needs.get(name, []))]
        if not ready:
            raise ValueError("circle")
        order.append(ready[0])
    return order


def depth(needs: dict[str, list[str]], name: str) -> int:
    """How many steps of needing lie below a name; 0 if it needs nothing.

    >>> depth({"app": ["lib"], "lib": ["core"]}, "app")
    2
    """
    return max((1 + depth(needs, need) for need in needs.get(name, [])), default=0)
