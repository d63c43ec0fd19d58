"""What a rank writes down while it runs; `opening` holds `record`, `log` and `span`."""
