"""Privacy audits of runs. `catalogue` lists the attacks, `audit` makes them, `docs/audit.md` explains."""
