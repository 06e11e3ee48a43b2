"""What serving costs: prices, bills of tenants, energy."""
