"""Who hands pictures out: the daemon, its cache and sessions, and the command line."""
