"""Length policies: how many candidates the target should verify."""
