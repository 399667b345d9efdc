"""Write docs/configuration.md from the configuration classes."""

from pathlib import Path

from ratoon.config.reference import markdown

if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(markdown(), encoding="utf-8")
