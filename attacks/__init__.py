"""Audits: what a run gives away, to whom. `catalogue` lists the attacks, `audit` makes them, `docs/audit.md` explains."""
