"""What people look at: `metrics.csv`, `trace.json`, `report.html`; and a page while it runs."""
