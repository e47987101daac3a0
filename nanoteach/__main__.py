"""`python -m nanoteach`."""

from nanoteach.cli import main

raise SystemExit(main())
