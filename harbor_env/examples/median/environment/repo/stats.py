"""Small statistics."""


def median(values):
    """The middle of the values; of two middle ones their mean."""
    return values[len(values) // 2]


def spread(values):
    """The largest less the smallest."""
    return max(values) - min(values)
