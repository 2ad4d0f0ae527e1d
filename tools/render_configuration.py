"""Write what is made from the configuration's fields: docs/configuration.md and buckets.toml."""

from pathlib import Path

from graphdecode.config.reference import default_file, reference

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "configuration.md").write_text(reference(), encoding="utf-8")
    (ROOT / "buckets.toml").write_text(default_file(), encoding="utf-8")
