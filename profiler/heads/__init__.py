"""Small modules trained on a frozen target: exit heads, parallel heads, Kangaroo's adapter."""
