"""Tables and numbers of the page."""


def plots():
    """Imports the plots late, so that the check of the page needs no matplotlib."""
    import plots

    return plots


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def picture(name, text):
    return f"![{text}](evaluation/{name}.svg)\n"


def named(rows, name):
    """Returns the row of a system."""
    return next(row for row in rows if row["name"] == name)


def rate(value):
    """Returns requests per second. The search for a rate ends within 3 %."""
    return f"{value:.3g}"


def ratio(ours, paper):
    return f"{ours / paper:.2f}" if paper else ""


def band(value, low, high):
    return "in the band" if low <= value <= high else "outside the band"
