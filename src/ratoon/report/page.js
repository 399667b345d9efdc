// Reads a chart's numbers out under the pointer. The page says all it has to say without this.
for (const svg of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor");
  const readout = svg.parentElement.querySelector(".readout");
  const steps = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const at = data.series.map((s) => new Map(s.points));
  const resting = readout.innerHTML;

  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * data.width;
    const share = (pixel - data.left) / (data.width - data.left - data.right);
    const wanted = data.x[0] + share * (data.x[1] - data.x[0]);
    const step = steps.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    const span = data.x[1] - data.x[0] || 1;
    const x = data.left + ((step - data.x[0]) / span) * (data.width - data.left - data.right);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    readout.textContent = `${data.across} ${Number(step.toPrecision(4))}`;
    data.series.forEach((series, i) => {
      if (!at[i].has(step)) return;
      const value = document.createElement("b");
      value.textContent = at[i].get(step);
      readout.append(` · ${series.name} `, value);
    });
  };
  const hide = () => {
    cursor.style.visibility = "hidden";
    readout.innerHTML = resting;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
