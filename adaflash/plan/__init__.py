"""How much memory a run will take on each device, by part, before anything is loaded: `adaflash plan`."""
