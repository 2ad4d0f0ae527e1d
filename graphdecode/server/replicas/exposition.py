"""What several replicas tell Prometheus, as one text in its format."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, str]) -> str:
    """Return one text in which each sample has the label `replica`.

    Args:
        texts: in Prometheus' text format, by the name of the replica.
    """
    families: dict[str, list[str]] = {}  # what introduces a family, and behind it the samples of all replicas
    for replica, text in texts.items():
        introduced = ""
        for line in text.splitlines():
            if line.startswith("# HELP"):
                introduced = line
                families.setdefault(introduced, [])
            elif line.startswith("#"):
                if line not in families[introduced]:
                    families[introduced].append(line)
            elif line:
                families[introduced].append(_labelled(line, replica))
    lines = [line for introduced, others in families.items() for line in (introduced, *others)]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, replica: str) -> str:
    """Return a sample with one label more; ours all have one, so that there is a brace."""
    name, _, rest = sample.partition("{")
    return f'{name}{{replica="{replica}",{rest}'
