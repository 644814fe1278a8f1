"""How fast: one timing harness, ceilings and peers measured in the same run, recorded with machine, versions and date."""
