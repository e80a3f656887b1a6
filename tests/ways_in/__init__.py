"""Tests of how a run is started: the command line, Hydra, launchers, registry names, the examples."""
