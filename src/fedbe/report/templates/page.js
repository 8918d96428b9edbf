"use strict";
/* Draws the charts from the data in the page. Text from files becomes textContent only, never markup. */
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const hidden = new Set(); // methods that the user has hidden
  const tip = document.getElementById("tip");
  let data = JSON.parse(document.getElementById("data").textContent);

  const svg = (tag, attributes, parent, text) => {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const html = (tag, text, parent, className) => {
    const node = document.createElement(tag);
    if (text) node.textContent = text;
    if (className) node.className = className;
    if (parent) parent.append(node);
    return node;
  };
  const colour = (method) => `var(--m-${data.colours[method] || "other"})`;
  const shown = (items) => items.filter((item) => !hidden.has(item.method));
  const textWidth = (text, size = 7) => text.length * size;

  /* Round values that divide [low, high] into about `count` parts. */
  function ticks(low, high, count) {
    const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
    const digits = Math.max(0, -Math.floor(Math.log10(step)) + (String(step / power).startsWith("2.5") ? 1 : 0));
    return Array.from({ length: last - first + 1 }, (_, i) => ({ at: (first + i) * step, text: ((first + i) * step).toFixed(digits) }));
  }

  /* Move labels apart where they would touch, column by column. */
  function spread(labels, gap, low, high) {
    const column = (label) => Math.round(label.x / 40);
    for (const x of new Set(labels.map(column))) spreadColumn(labels.filter((label) => column(label) === x), gap, low, high);
    return labels;
  }

  function spreadColumn(labels, gap, low, high) {
    labels.sort((a, b) => a.y - b.y);
    for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + gap);
    const over = labels.length ? labels[labels.length - 1].y - high : 0;
    if (over > 0) for (let i = labels.length - 1, limit = high; i >= 0; i--, limit -= gap) labels[i].y = Math.min(labels[i].y, limit);
    for (const label of labels) label.y = Math.max(label.y, low);
  }

  const value = (chart, number) => `${number.toFixed(chart.digits)} ${chart.unit}`.trim();
  const withSpread = (chart, p) => value(chart, p.y) + (p.high === null ? "" : ` ± ${(p.high - p.y).toFixed(chart.digits)}`) + ` (n = ${p.n})`;

  function frame(panel, width, height, name) {
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": name }, panel);
  }

  function grid(root, box, xs, ys, chart) {
    for (const t of ys.ticks) {
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: ys.at(t.at), y2: ys.at(t.at) }, root);
      svg("text", { x: box.left - 8, y: ys.at(t.at) + 4, "text-anchor": "end" }, root, t.text);
    }
    for (const t of xs.ticks) svg("text", { x: xs.at(t.at), y: box.bottom + 18, "text-anchor": "middle" }, root, t.text);
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
    svg("text", { x: 0, y: 11 }, root, chart.y_label);
    svg("text", { x: box.right, y: box.bottom + 34, "text-anchor": "end" }, root, chart.x_label);
  }

  function axis(low, high, from, to, count) {
    const marks = ticks(low, high, count), first = marks[0].at, last = marks[marks.length - 1].at;
    return { ticks: marks, at: (v) => from + ((v - first) / (last - first || 1)) * (to - from) };
  }

  function roundAxis(points, from, to) {
    const low = Math.min(...points.map((p) => p.x)), high = Math.max(...points.map((p) => p.x));
    const marks = ticks(low, high, Math.max(2, Math.floor((to - from) / 60))).filter((t) => Number.isInteger(t.at) && t.at >= low && t.at <= high).map((t) => ({ at: t.at, text: String(t.at) }));
    if (!marks.length || marks[0].at - low > (high - low) / 20) marks.unshift({ at: low, text: String(low) });
    return { ticks: marks, at: (v) => (high === low ? from + 12 : from + ((v - low) / (high - low)) * (to - from)) };
  }

  function drawLines(chart, panel, node, width) {
    const series = shown(panel.series);
    if (!series.length) return null;
    const all = chart.panels.flatMap((p) => shown(p.series)).flatMap((s) => s.points);
    const least = Math.min(...all.map((p) => (p.low === null ? p.y : p.low))), most = Math.max(...all.map((p) => (p.high === null ? p.y : p.high)));
    const pad = Math.max(0, (4 - (most - least)) / 2), low = least - pad, high = most + pad; // at least 4 points, so that noise does not fill the chart
    // In a titled panel all lines have one colour, so a label shows a piece of its line. Otherwise it shows the last value.
    const sample = panel.title ? 18 : 0, name = (s) => (sample ? s.label : `${s.label} ${s.points[s.points.length - 1].y.toFixed(chart.digits)}`);
    const right = Math.max(...series.map((s) => textWidth(name(s)))) + 14 + sample;
    const oneRound = all.every((p) => p.x === all[0].x);
    const height = oneRound ? 180 : Math.round(Math.min(400, Math.max(230, width * (width < 620 ? 0.72 : 0.46))));
    const box = { left: 34, right: width - right, top: 26, bottom: height - 40 };
    const root = frame(node, width, height, `${panel.title} ${chart.title}`);
    const xs = roundAxis(all, box.left, box.right);
    const ys = axis(chart.unit === "points" ? 0 : Math.max(0, low), Math.min(high, 100), box.bottom, box.top, height / 62);
    grid(root, box, xs, ys, chart);
    for (const s of series) drawSeries(root, s, xs, ys);
    const ends = series.map((s) => ({ y: ys.at(s.points[s.points.length - 1].y), x: xs.at(s.points[s.points.length - 1].x), s }));
    for (const end of ends) svg("circle", { cx: end.x, cy: end.y, r: 3.5, fill: colour(end.s.method), opacity: end.s.style === "faint" ? 0.6 : 1 }, root);
    for (const l of spread(ends, 15, box.top, box.bottom)) {
      if (sample) svg("line", { x1: l.x + 9, x2: l.x + 9 + sample - 4, y1: l.y, y2: l.y, ...stroke(l.s) }, root);
      svg("text", { class: "label", x: l.x + 9 + sample, y: l.y + 4, style: `fill:${colour(l.s.method)}` }, root, name(l.s));
    }
    return { root, stops: lineStops(chart, series, xs, ys), vertical: box };
  }

  function drawSeries(root, s, xs, ys) {
    const group = svg("g", { class: "series", "data-method": s.method }, root);
    const banded = s.points.filter((p) => p.low !== null);
    if (banded.length > 1 && s.style === "solid") {
      const edge = (key) => banded.map((p) => `${xs.at(p.x)},${ys.at(p[key])}`);
      svg("polygon", { points: [...edge("high"), ...edge("low").reverse()].join(" "), fill: colour(s.method), opacity: 0.14, class: "band" }, group);
    }
    svg("polyline", { points: s.points.map((p) => `${xs.at(p.x)},${ys.at(p.y)}`).join(" "), class: "line", fill: "none", ...stroke(s) }, group);
  }

  function stroke(s) {
    const faint = s.style === "faint", dash = s.style === "dashed" ? { "stroke-dasharray": "5 4" } : {};
    return { stroke: colour(s.method), "stroke-width": faint ? 1.3 : 2.2, "stroke-linejoin": "round", opacity: faint ? 0.7 : 1, ...dash };
  }

  function lineStops(chart, series, xs, ys) {
    const rounds = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
    return rounds.map((x) => {
      const here = series.map((s) => [s, s.points.find((p) => p.x === x)]).filter(([, p]) => p).sort((a, b) => b[1].y - a[1].y);
      return { x: xs.at(x), y: ys.at(here[0][1].y), head: `Round ${x}`, rows: here.map(([s, p]) => [s.label, withSpread(chart, p)]) };
    });
  }

  function drawBars(chart, panel, node, width) {
    const bars = shown(panel.bars);
    if (!bars.length) return null;
    const most = Math.max(...chart.panels.flatMap((p) => shown(p.bars)).map((b) => b.value)) || 1;
    const room = width - Math.max(...bars.map((b) => textWidth(b.text))) - 10, step = 42;
    const root = frame(node, width, bars.length * step, `${panel.title}: ${bars.map((b) => `${b.label} ${b.text}`).join(", ")}`);
    const stops = bars.map((b, i) => {
      const length = Math.max(1, (b.value / most) * room), y = i * step;
      svg("text", { x: 0, y: y + 12 }, root, b.label);
      svg("rect", { class: "bar", "data-method": b.method, x: 0, y: y + 18, width: length, height: 13, fill: colour(b.method) }, root);
      svg("text", { class: "strong", x: length + 6, y: y + 29 }, root, b.text);
      return { x: length / 2, y: y + 24, head: `${b.label}, ${panel.title}`, rows: [[b.text, ""]] };
    });
    return { root, stops };
  }

  function drawDots(chart, panel, node, width) {
    const dots = shown(panel.dots), seeds = dots.filter((d) => !d.role), means = dots.filter((d) => d.role);
    if (!dots.length) return null;
    // Both axes have the same scale, wide enough to show the diagonal.
    const low = Math.min(...dots.flatMap((d) => [d.x, d.y])), high = Math.max(...dots.flatMap((d) => [d.x, d.y]));
    const pad = Math.max(1, (8 - (high - low)) / 2, 0.12 * (high - low));
    const side = Math.min(width - 34 - 24, 400), box = { left: 34, right: 34 + side, top: 26, bottom: 26 + side };
    const root = frame(node, width, side + 70, chart.title);
    const xs = axis(low - pad, Math.min(100, high + pad), box.left, box.right, 5), ys = axis(low - pad, Math.min(100, high + pad), box.bottom, box.top, 5);
    grid(root, box, xs, ys, chart);
    svg("line", { class: "axis", x1: box.left, y1: box.bottom, x2: box.right, y2: box.top, "stroke-dasharray": "2 3" }, root);
    svg("text", { x: box.right - 6, y: box.bottom - 8, "text-anchor": "end" }, root, "overconfident");
    svg("text", { x: box.left + 6, y: box.top + 14 }, root, "underconfident");
    for (const d of seeds) svg("circle", { class: "dot", "data-method": d.method, cx: xs.at(d.x), cy: ys.at(d.y), r: 4, fill: colour(d.method), "fill-opacity": 0.8 }, root);
    const labels = means.map((d) => ({ d, x: xs.at(d.x), y: ys.at(d.y) }));
    for (const l of labels) svg("circle", { class: "mean", cx: l.x, cy: l.y, r: 8, fill: "none", stroke: colour(l.d.method), "stroke-width": 2 }, root);
    // Labels point away from the other dots: left of the middle they are on the left.
    const middle = labels.reduce((sum, l) => sum + l.x, 0) / labels.length;
    for (const l of labels) l.left = (l.x < middle - 1 && l.x - 16 - textWidth(l.d.label) > 0) || l.x + 16 + textWidth(l.d.label) > width;
    for (const side of [true, false]) spread(labels.filter((l) => l.left === side), 16, box.top, box.bottom);
    for (const l of labels) {
      const left = l.left;
      svg("text", { class: "label", x: l.x + (left ? -14 : 14), y: l.y + 4, "text-anchor": left ? "end" : "start", style: `fill:${colour(l.d.method)}` }, root, l.d.label);
    }
    const stops = dots.map((d) => ({ x: xs.at(d.x), y: ys.at(d.y), head: d.role ? `${d.label}, mean` : d.label, rows: [["confidence", value(chart, d.x)], ["accuracy", value(chart, d.y)]] }));
    return { root, stops };
  }

  function drawBubbles(chart, panel, node, width) {
    const { rows, columns, counts } = panel, longest = Math.max(...columns.map((c) => c.length));
    const left = 56, head = Math.min(90, longest > 3 ? 12 + longest * 6 : 22), totals = 46;
    const cell = Math.max(5, Math.min(34, (width - left - totals) / columns.length)), most = Math.max(1, ...counts.flat());
    const wide = Math.max(width, left + columns.length * cell + totals);
    const root = frame(node, wide, head + rows.length * cell + 34, chart.title), every = Math.ceil(12 / cell), stops = [];
    if (wide > width) root.style.width = `${wide}px`;  // the panel scrolls
    columns.forEach((name, j) => {
      const x = left + (j + 0.5) * cell;
      if (j % every) return;
      const turn = longest > 3 ? { transform: `rotate(-90 ${x} ${head - 6})`, "text-anchor": "start", y: head - 2 } : { "text-anchor": "middle", y: head - 8 };
      svg("text", { x, ...turn }, root, name.slice(0, 14));
    });
    rows.forEach((name, i) => {
      const y = head + (i + 0.5) * cell, total = counts[i].reduce((a, b) => a + b, 0);
      svg("line", { class: "grid", x1: left, x2: left + columns.length * cell, y1: y, y2: y }, root);
      if (i % every === 0) {
        svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, root, name);
        svg("text", { x: left + columns.length * cell + 8, y: y + 4 }, root, total.toLocaleString("en"));
      }
      counts[i].forEach((count, j) => {
        if (!count) return;
        const x = left + (j + 0.5) * cell;
        svg("circle", { class: "bubble", cx: x, cy: y, r: Math.max(0.8, (cell / 2 - 1) * Math.sqrt(count / most)) }, root);
        stops.push({ x, y, head: `${name}, class ${columns[j]}`, rows: [[`${count.toLocaleString("en")} examples`, ""]] });
      });
    });
    const foot = head + rows.length * cell + 22;
    svg("text", { x: left, y: foot }, root, `largest: ${most.toLocaleString("en")} ${chart.unit}; right: total of the ${chart.y_label}`);
    return { root, stops };
  }

  function shade(share) {
    const position = Math.min(3.9999, share * 4), first = Math.floor(position), mix = Math.round((position - first) * 100);
    return `color-mix(in oklab, var(--ramp-${first + 1}) ${mix}%, var(--ramp-${first}))`;
  }

  function star(x, y, size) {
    const corners = [...Array(10).keys()].map((i) => [((i * 36 - 90) * Math.PI) / 180, i % 2 ? size * 0.42 : size]);
    return `M${corners.map(([angle, radius]) => `${(x + radius * Math.cos(angle)).toFixed(1)},${(y + radius * Math.sin(angle)).toFixed(1)}`).join("L")}Z`;
  }

  function drawTriangle(chart, panel, node, width) {
    const side = Math.min(width - 40, 420), left = (width - side) / 2, top = 34, tall = (side * Math.sqrt(3)) / 2;
    const root = frame(node, width, top + tall + 84, chart.title), at = (d) => [left + d.x * side, top + tall - d.y * side];
    const corners = panel.dots.filter((d) => d.role === "corner");
    svg("polygon", { points: corners.map((d) => at(d).join(",")).join(" "), fill: "none", class: "axis" }, root);
    const stops = panel.dots.map((d) => {
      const [x, y] = at(d);
      if (d.role === "best") svg("path", { class: "star", d: star(x, y, 10), style: `fill:${shade(d.colour)}` }, root);
      else svg("circle", { class: `dot ${d.role}`, cx: x, cy: y, r: d.role ? 8 : 4.2, style: `fill:${shade(d.colour)}` }, root);
      if (d.role && d.role !== "best") svg("circle", { class: "ring", cx: x, cy: y, r: 8 }, root);
      return { x, y, head: d.label, rows: [] };
    });
    for (const d of panel.dots.filter((item) => item.role)) {
      const [x, y] = at(d), best = d.role === "best", room = 16 + textWidth(d.label);
      const outside = best && (d.x < 0.5 ? x > room && "end" : x + room < width && "start");  // clear of the other labels
      const above = best ? d.y < 0.2 : d.y > 0.5 || d.role === "centre";
      const anchor = outside || (d.role === "centre" || (!best && d.y > 0.5) ? "middle" : d.x < 0.5 ? "start" : "end");
      const shift = outside ? { start: 14, end: -14 }[anchor] : { start: -12, middle: 0, end: 12 }[anchor];
      svg("text", { class: "label strong", x: x + shift, y: outside ? y + 4 : above ? y - 14 : y + 25, "text-anchor": anchor }, root, d.label);
    }
    const bar = top + tall + 48;
    for (let i = 0; i < 40; i++) svg("rect", { x: left + (side / 40) * i, y: bar, width: side / 40 + 0.6, height: 9, style: `fill:${shade(i / 39)}` }, root);
    svg("text", { x: left, y: bar + 25 }, root, `test accuracy ${value(chart, panel.scale[0])}`);
    svg("text", { x: left + side, y: bar + 25, "text-anchor": "end" }, root, value(chart, panel.scale[1]));
    return { root, stops };
  }

  const draw = { lines: drawLines, bars: drawBars, dots: drawDots, bubbles: drawBubbles, triangle: drawTriangle };

  /* The pointer and the arrow keys move along the stops of a drawing: the places with a value to read. */
  function explore({ root, stops, vertical }) {
    let current = -1, mark = null;
    const hide = () => { tip.hidden = true; if (mark) mark.remove(); mark = null; };
    const show = (i) => {
      hide();
      current = i;
      const stop = stops[i];
      mark = vertical
        ? svg("line", { class: "cursor", x1: stop.x, x2: stop.x, y1: vertical.top, y2: vertical.bottom }, root)
        : svg("circle", { class: "ring", cx: stop.x, cy: stop.y, r: 9 }, root);
      showTip(root, stop);
    };
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), zoom = root.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
      const distances = stops.map((s) => (s.x - x) ** 2 + (vertical ? 0 : (s.y - y) ** 2));
      show(distances.indexOf(Math.min(...distances)));
    });
    root.addEventListener("pointerleave", hide);
    root.addEventListener("blur", hide);
    root.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      show((current + step + stops.length) % stops.length);
    });
  }

  function showTip(root, stop) {
    tip.replaceChildren();
    html("p", stop.head, tip);
    for (const [name, text] of stop.rows) {
      const row = html("p", "", tip);
      html("span", name, row);
      html("span", text, row);
    }
    tip.hidden = false;
    const box = root.getBoundingClientRect(), zoom = box.width / root.viewBox.baseVal.width, size = tip.getBoundingClientRect();
    const x = box.left + stop.x * zoom + 14, y = box.top + stop.y * zoom - size.height - 10;
    tip.style.left = `${Math.max(6, x + size.width > innerWidth - 6 ? x - size.width - 28 : x)}px`;
    tip.style.top = `${Math.max(6, y)}px`;
  }

  function render() {
    tip.hidden = true;
    for (const [id, chart] of Object.entries(data.charts)) {
      const plot = document.querySelector(`#${CSS.escape(id)} .plot`);
      plot.replaceChildren();
      const panels = chart.panels.filter((p) => !p.series.length || shown(p.series).length);
      for (const panel of panels) {
        const node = html("div", "", plot, "panel");
        if (panel.title) html("h4", panel.title, node);
      }
      // All panels must exist before the first is drawn: only then has each its width.
      panels.forEach((panel, i) => {
        const drawing = draw[chart.kind](chart, panel, plot.children[i], plot.children[i].clientWidth);
        if (drawing) explore(drawing);
      });
      if (!plot.querySelector("svg")) plot.replaceChildren(html("p", "All methods of this chart are hidden.", null, "missing"));
    }
  }

  function applySwitches() {
    for (const button of document.querySelectorAll(".switch")) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.method)));
    for (const row of document.querySelectorAll("tr[data-method]")) row.classList.toggle("off", hidden.has(row.dataset.method));
    for (const swatch of document.querySelectorAll("[data-method] > .swatch, th > .swatch")) swatch.style.background = colour(swatch.closest("[data-method]").dataset.method);
    render();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".switch");
    if (!button) return;
    const method = button.dataset.method;
    if (!hidden.delete(method)) hidden.add(method);
    applySwitches();
  });

  const theme = document.getElementById("theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
  const remember = (name) => { try { localStorage.setItem("fedbe-theme", name); } catch { /* a page from a file may not be allowed to store */ } };
  const recall = () => { try { return localStorage.getItem("fedbe-theme"); } catch { return null; } };
  theme.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; remember(document.documentElement.dataset.theme); nameTheme(); });
  prefersDark.addEventListener("change", nameTheme);
  if (["light", "dark"].includes(recall())) document.documentElement.dataset.theme = recall();
  nameTheme();

  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // on a phone the address bar changes only the height
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(render, 120);
  });
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { document.documentElement.classList.toggle("printing", printing); render(); });
  }
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  applySwitches();

  /* `fedbe watch`: ask for the version every 1.5 s. When it is new, load the new page into this one. */
  const stamp = document.querySelector('meta[name="fedbe-version"]'), live = document.getElementById("live");
  const get = async (path) => {
    const reply = await fetch(path, { cache: "no-store" });
    if (!reply.ok) throw new Error("the run cannot be read now; this page shows its last state");
    return reply.text();
  };
  async function follow() {
    try {
      if (await get("/version") !== stamp.content) {
        const fresh = new DOMParser().parseFromString(await get("/"), "text/html");
        const open = [...document.querySelectorAll("figure:has(details[open])")].map((f) => f.id);
        document.getElementById("report").replaceWith(fresh.getElementById("report"));
        for (const id of open) document.getElementById(id)?.querySelector("details").setAttribute("open", "");
        data = JSON.parse(fresh.getElementById("data").textContent);
        stamp.content = fresh.querySelector('meta[name="fedbe-version"]').content;
        applySwitches();
      }
      live.textContent = "following the run";
    } catch (problem) {
      const ended = "fedbe watch has stopped; this page is no longer updated"; // fetch raises TypeError without an answer
      live.textContent = problem instanceof TypeError ? ended : problem.message;
    }
    setTimeout(follow, 1500);
  }
  if (stamp.content) follow();
})();
