"""Another GPU than the one measured: data sheets, a cost model, and its error."""
