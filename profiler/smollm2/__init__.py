"""SmolLM2-135M-Instruct as a target: brought, converted, and drafters trained for it."""
