"""`adaflash report`: runs side by side on one page that needs no network."""
