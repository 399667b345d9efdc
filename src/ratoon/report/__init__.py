"""A run folder in, one self-contained page out."""

from ratoon.report.page import write_report

__all__ = ["write_report"]
