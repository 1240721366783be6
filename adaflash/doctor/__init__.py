"""adaflash doctor: finds what would lower acceptance, or stop a run, without saying so."""
