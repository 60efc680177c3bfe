"""`tunesmith bench`: measures which settings train fastest."""
