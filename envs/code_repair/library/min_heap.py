"""A heap that gives back the smallest number first."""


class MinHeap:
    """Numbers; children of index i are at 2i + 1 and 2i + 2 and never smaller.

    >>> heap = MinHeap()
    >>> for number in (3, 1, 2):
    ...     heap.push(number)
    >>> heap.pop(), heap.pop(), heap.size()
    (1, 2, 1)
    """

    def __init__(self) -> None:
        self.items: list[int] = []

    def size(self) -> int:
        """How many numbers are in it."""
        return len(self.items)

    def push(self, number: int) -> None:
        """Put a number in."""
        self.items.append(number)
        index = len(self.items) - 1
        while index > 0 and self.items[index] < self.items[(index - 1) // 2]:
            parent = (index - 1) // 2
            self.items[index], self.items[parent] = self.items[parent], self.items[index]
            index = parent

    def pop(self) -> int | None:
        """Take the smallest out; None if there is none."""
        if not self.items:
            return None
        smallest = self.items[0]
        last = self.items.pop()
        if self.items:
            self.items[0] = last
            self._sink(0)
        return smallest

    def _sink(self, index: int) -> None:
        while True:
            least = index
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self.items) and self.items[child] < self.items[least]:
                    least = child
            if least == index:
                return
            self.items[index], self.items[least] = self.items[least], self.items[index]
            index = least
