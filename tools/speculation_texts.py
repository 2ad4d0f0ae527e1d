"""Prompts for speculation: where the answer says again what the prompt says, and free prose; eight of each kind."""

from __future__ import annotations

import random

KINDS = ("edit", "summary", "json", "prose")

_CODE = """\
def read_{0}(path):
    {0} = []
    with open(path) as file:
        for line in file:
            parts = line.strip().split(",")
            if len(parts) != 3:
                continue
            name, count, price = parts
            {0}.append({{"name": name, "count": int(count), "price": float(price)}})
    return {0}


def total_price({0}):
    total = 0.0
    for entry in {0}:
        total += entry["count"] * entry["price"]
    return total


def most_expensive({0}):
    best = None
    for entry in {0}:
        if best is None or entry["price"] > best["price"]:
            best = entry
    return best
"""
_OLD = ("rows", "goods", "orders", "parts", "books", "tools", "plants", "wines")
_NEW = ("items", "stock", "sales", "pieces", "titles", "gear", "seeds", "bottles")
_PAGE = (
    "The harbour of {0} was built in the year {1}, after the great fire had destroyed the old town on the island. The "
    "merchants of the town paid for the first stone pier, and the king gave them the right to collect a toll from "
    "every ship that used it. In the eighteenth century the harbour was the third largest of the country. Timber, iron "
    "and tar were loaded there, and salt, cloth and wine came in. The railway reached the harbour in {2}. A new basin "
    "for steamers was opened in {3}, and the old stone pier was used by fishing boats only. Today the harbour of {0} "
    "is a marina with room for four hundred boats, and the old customs house is a museum."
)
_TOWNS = ("Kalmar", "Visby", "Ystad", "Malmo", "Lund", "Kiruna", "Falun", "Umea")
_FIRST = ("Anna", "Oscar", "Maja", "Erik", "Sara", "Nils", "Eva", "Lars", "Ida", "Karl")
_LAST = ("Berg", "Lind", "Holm", "Dahl", "Ek", "Bo", "Strand", "Wall", "Nord", "Falk")
_TRADES = ("engineer", "teacher", "nurse", "carpenter", "lawyer", "miner", "baker", "painter")
_TOPICS = (
    "a lighthouse keeper who finds a letter in a bottle",
    "a fox that learns to read",
    "the last train over the mountains",
    "a clock that runs backwards",
    "two brothers who build a boat",
    "a gardener and a thief",
    "a town without a sound",
    "a violin that nobody may play",
)


def conversations(kind: str, count: int) -> list[list[dict[str, str]]]:
    """Return so many conversations of a kind, each ending with the beginning of the answer.

    Args:
        kind: one of `KINDS`.
        count: at most 8.
    """
    return [_conversation(kind, index) for index in range(count)]


def _conversation(kind: str, index: int) -> list[dict[str, str]]:
    if kind == "edit":
        code, new = _CODE.format(_OLD[index]), _NEW[index]
        question = (
            f"Here is a Python file:\n\n```python\n{code}```\n\nRewrite the whole file with the variable "
            f"`{_OLD[index]}` renamed to `{new}`. Answer with the complete code only."
        )
        answer = f"```python\ndef read_{_OLD[index]}(path):"
    elif kind == "summary":
        town = _TOWNS[index]
        page = _PAGE.format(town, 1640 + 7 * index, 1874 + index, 1891 + 2 * index)
        question = f"{page}\n\nSummarise this page in four sentences, in its own words."
        answer = f"The harbour of {town} was built in the year"
    elif kind == "json":
        rng = random.Random(index)
        people = [(rng.choice(_FIRST), rng.choice(_LAST), rng.randrange(20, 70)) for _ in range(7)]
        lines = [f"{first} {last}, {age} years, {rng.choice(_TRADES)}" for first, last, age in people]
        question = "\n".join(lines) + (
            '\n\nAnswer in JSON: a list of objects with the keys "first_name", "last_name", "age" and "profession", '
            "one for each person."
        )
        first, last, age = people[0]
        entry = f'{{\n    "first_name": "{first}",\n    "last_name": "{last}",\n    "age": {age},'
        answer = f"```json\n[\n  {entry}"
    else:
        question = f"Write a short story about {_TOPICS[index]}."
        answer = "It was"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
