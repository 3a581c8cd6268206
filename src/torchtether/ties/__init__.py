"""Which names share memory, and with which geometry: found, recorded, checked, edited."""
