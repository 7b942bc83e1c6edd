"use strict";
// Maps of speedups: shaded by lightness where speculation is faster, hatched where it is not.
const maps = (() => {
  const { add, canvas, shade, legible, number, times, INK: AXIS, DARK: INK } = charts;

  function hatching(svg, name) {
    const hatch = add(add(svg, "defs"), "pattern", { id: `hatch-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    add(hatch, "rect", { width: 6, height: 6, fill: "#fff" });
    add(hatch, "line", { x1: 0, x2: 0, y1: 0, y2: 6, stroke: "#9a9a9a", "stroke-width": 1.6 });
    return `url(#hatch-${name})`;
  }

  // Labels along the left, the title of both axes, and the key of the shades.
  function frame(svg, { left, right, top, bottom, h, ys, xLabel, yLabel, reach }) {
    const lines = Math.ceil(ys.length / Math.floor((bottom - top) / 16));
    ys.forEach((v, j) => {
      if (j % lines === 0) add(svg, "text", { x: left - 6, y: bottom - (j + 0.5) * h + 4, "text-anchor": "end" }, number(v));
    });
    add(svg, "text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, xLabel);
    add(svg, "text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, yLabel);
    const key = bottom + 42, n = 24, kw = Math.min(200, right - left - 130) / n;
    add(svg, "text", { x: left, y: key + 11 }, "1×");
    for (let i = 0; i < n; i++) add(svg, "rect", { x: left + 22 + i * kw, y: key, width: kw + 0.4, height: 12, fill: shade(1 + (reach * i) / (n - 1), reach) });
    add(svg, "text", { x: left + 28 + n * kw, y: key + 11 }, (1 + reach).toFixed(2) + "×");
  }

  const reachOf = (grid) => Math.max(0.05, Math.max(...grid.flat()) - 1);

  // Over c (across, logarithmic) and another axis (up).  `even` gives each row's break-even c
  // with its interval, `dashed` the break-even c of another model at any height.
  function ratioMap(place, cs, ys, value, { even, dashed, yLabel, yText, at, name }) {
    const { svg, width, height } = canvas(place, 300);
    const left = 54, right = width - 22, top = 8, bottom = height - 62;
    const h = (bottom - top) / ys.length, first = cs[0], last = cs[cs.length - 1];
    const x = (c) => left + (right - left) * Math.min(1, Math.max(0, Math.log(c / first) / Math.log(last / first)));
    // Rows stand at equal distances; between two, a value is read along the line.
    const row = (v) => {
      const j = Math.max(0, Math.min(ys.length - 2, ys.findLastIndex((y) => y <= v)));
      return Math.max(-0.5, Math.min(ys.length - 0.5, j + (v - ys[j]) / (ys[j + 1] - ys[j])));
    };
    const y = (v) => bottom - ((ys.length > 1 ? row(v) : 0) + 0.5) * h;
    const grid = ys.map((v) => cs.map((c) => value(c, v))), reach = reachOf(grid);
    const hatch = hatching(svg, name), edges = cs.slice(1).map((c, i) => Math.sqrt(c * cs[i]));
    const starts = [first, ...edges], ends = [...edges, last];
    grid.forEach((values, j) => values.forEach((v, i) => {
      const cell = add(svg, "rect", {
        x: x(starts[i]), y: bottom - (j + 1) * h, width: x(ends[i]) - x(starts[i]) + 0.4, height: h + 0.4,
        fill: shade(Math.max(v, 1), reach),
      });
      add(cell, "title", {}, `c = ${number(cs[i])}, ${yText(ys[j])}: ${times(v)}`);
    }));
    const evens = ys.map((v) => even(v));
    let line = "";
    evens.forEach(({ ratio }, j) => {
      const base = bottom - j * h;
      if (!(ratio >= last)) {
        // The cells below keep their titles.
        add(svg, "rect", { x: x(ratio), y: base - h, width: right - x(ratio), height: h + 0.4, fill: hatch, "pointer-events": "none" });
      }
      if (ratio > first && ratio < last) line += `M${x(ratio)} ${base}v${-h}`;
      // An arrow where break-even lies outside the map.
      const arrow = ratio >= last ? `M${right + 5} ${base - h / 2 - 4}l7 4-7 4z`
        : ratio <= first ? `M${left + 9} ${base - h / 2 - 4}l-7 4 7 4z` : "";
      if (arrow) add(svg, "path", { d: arrow, fill: AXIS, stroke: "var(--paper)", "stroke-width": 2, "paint-order": "stroke", "data-beyond": ys[j], "data-side": ratio >= last ? "right" : "left" });
      if (j + 1 < ys.length) line += `M${x(ratio)} ${base - h}H${x(evens[j + 1].ratio)}`;
    });
    if (line) add(svg, "path", { d: line, stroke: INK, "stroke-width": 2.6, fill: "none", "stroke-linecap": "square" });
    evens.forEach(({ ratio, low, high }, j) => {
      if (!(high > first && low < last)) return;
      const middle = bottom - (j + 0.5) * h, tick = Math.min(3, h / 4);
      const d = `M${x(low)} ${middle}H${x(high)}`
        + (low > first ? `M${x(low)} ${middle - tick}v${2 * tick}` : "") + (high < last ? `M${x(high)} ${middle - tick}v${2 * tick}` : "");
      add(svg, "path", { d, stroke: "#fff", "stroke-width": 3.4, fill: "none" });
      add(svg, "path", { d, stroke: INK, "stroke-width": 1.4, fill: "none", "data-row": ys[j], "data-even": ratio, "data-low": low, "data-high": high });
    });
    if (dashed) {
      const points = [];
      for (let k = 0; k <= 120; k++) {
        const v = ys[0] + ((ys[ys.length - 1] - ys[0]) * k) / 120, c = dashed(v);
        if (c > first && c < last) points.push(`${x(c)} ${y(v)}`);
      }
      const d = points.length > 1 ? "M" + points.join("L") : "";
      if (d) for (const [colour, thick, dash] of [["#fff", 3.4, ""], [INK, 1.4, "6 4"]]) {
        add(svg, "path", { d, stroke: colour, "stroke-width": thick, "stroke-dasharray": dash, fill: "none", "data-dashed": dash && "textbook" });
      }
    }
    // The cross and its white outline, to be seen on any shade; a logarithmic axis has no place for c = 0.
    if (at[0] > 0) for (const [colour, thick] of [["#fff", 6], ["#D55E00", 3]]) {
      add(svg, "path", { d: `M${x(at[0]) - 7} ${y(at[1])}h14M${x(at[0])} ${y(at[1]) - 7}v14`, stroke: colour, "stroke-width": thick, "stroke-linecap": "round" });
    }
    for (const c of [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]) {
      if (c < first * 0.999 || c > last * 1.001) continue;
      add(svg, "line", { x1: x(c), x2: x(c), y1: bottom, y2: bottom + 4, stroke: AXIS });
      add(svg, "text", { x: x(c), y: bottom + 16, "text-anchor": "middle" }, number(c));
    }
    frame(svg, { left, right, top, bottom, h, ys, xLabel: at[0] > 0 ? "cost ratio c" : "cost ratio c (the slider's c = 0 is left of the map)", yLabel, reach });
  }

  // Over two axes of steps, a figure in every cell; `low` and `high` bound it, `words` adds to it.
  function stepMap(place, xs, ys, cells, { xLabel, yLabel, xText, yText, words, name }) {
    const tall = words ? 40 : 27, { svg, width, height } = canvas(place, 70 + Math.max(90, tall * ys.length));
    const left = 54, right = width - 10, top = 8, bottom = height - 62;
    const w = (right - left) / xs.length, h = (bottom - top) / ys.length;
    const grid = ys.map((_, j) => xs.map((_, i) => cells.speedup[i][j])), reach = reachOf(grid);
    const hatch = hatching(svg, name);
    let edge = "";
    grid.forEach((row, j) => row.forEach((v, i) => {
      const pays = v >= 1, px = left + i * w, py = bottom - (j + 1) * h;
      const low = cells.low[i][j], high = cells.high[i][j], known = low !== null, doubt = known && low <= 1 && high >= 1;
      const cell = add(svg, "rect", { x: px, y: py, width: w + 0.4, height: h + 0.4, fill: pays ? shade(v, reach) : hatch });
      add(cell, "title", {}, `${xText(xs[i])}, ${yText(ys[j])}: ${times(v)} (95% interval ${known ? `${number(low)} to ${number(high)}` : "–"})${words ? ", " + words(i, j) : ""}`);
      if (i + 1 < xs.length && (row[i + 1] >= 1) !== pays) edge += `M${px + w} ${py}v${h}`;
      if (j + 1 < ys.length && (grid[j + 1][i] >= 1) !== pays) edge += `M${px} ${py}h${w}`;
      if (w < 34) return;
      const ink = { "text-anchor": "middle", "pointer-events": "none", ...(pays ? { class: "cell", style: `fill:${legible(v, reach)}` } : { class: "hatched" }) };
      const figure = v.toFixed(2) + (doubt ? " ?" : ""), x = px + w / 2, y = py + h / 2 + 4;
      add(svg, "text", { x, y: words ? y - 7 : y, ...ink, "data-x": xs[i], "data-y": ys[j], "data-value": v }, figure);
      if (words) add(svg, "text", { x, y: y + 9, ...ink }, words(i, j));
    }));
    if (edge) add(svg, "path", { d: edge, stroke: INK, "stroke-width": 2.6, fill: "none", "stroke-linecap": "square" });
    xs.forEach((v, i) => add(svg, "text", { x: left + (i + 0.5) * w, y: bottom + 15, "text-anchor": "middle" }, number(v)));
    frame(svg, { left, right, top, bottom, h, ys, xLabel, yLabel, reach });
  }

  return { ratioMap, stepMap };
})();
