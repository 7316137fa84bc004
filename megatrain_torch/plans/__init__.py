"""What a step takes in bytes and seconds, and where everything is to be: shapes, cost, a machine's rates,
placement, the simulated step, whether it fits. Looks at figures and before; at no model that is streamed.
"""
