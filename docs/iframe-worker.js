// Browsers start no worker for a page that is opened as a file, and the search is one.
// There its script runs in a hidden frame. (The offline plugin asks for another script
// from the network unless one has this name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inner = new Promise((resolve) => {
        frame.onload = () => {
          frame.onload = null
          const inner = frame.contentWindow
          inner.postMessage = (data) => {
            this.dispatchEvent(new MessageEvent("message", { data }))
          }
          const script = inner.document.createElement("script")
          script.onload = () => resolve(inner)
          script.src = url
          inner.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.inner.then((inner) => {
        inner.dispatchEvent(new MessageEvent("message", { data }))
      })
    }
  }
}
