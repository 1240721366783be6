"""Drafters of other projects in, ours out to servers. Import from the modules: this package imports nothing by itself."""
