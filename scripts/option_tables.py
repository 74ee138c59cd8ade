#!/usr/bin/env python3
"""Regenerate the option tables in docs/configuration.md from the declarations in the source."""

from pathlib import Path

from fedstrata.experiments.describe import with_option_tables

page = Path(__file__).parents[1] / "docs" / "configuration.md"
page.write_text(with_option_tables(page.read_text()))
