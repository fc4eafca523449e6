"""What crosses ranks: counts (with the one host sync), rows over the EP group, parts over the ETP group."""
