"""Plugins, one class per file, imported as `adaflash.callbacks.<file>`."""

if __name__ == "callbacks":
    raise ImportError("import adaflash.callbacks, not callbacks")
