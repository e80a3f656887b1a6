"""Tests of one process: no process group but a fake one, no training. ``make unit`` runs them in under a minute."""
