"""Who computes a picture: worker processes and their supervisor."""
